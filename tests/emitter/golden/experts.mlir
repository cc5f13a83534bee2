// castiron emit --kernel experts --shape 2x16x64 --codec bf16 --tokens 2 --isa avx2 --threads 2
// 181 lines, sha256 7daec53d328507c6f5a5447f8ae4f068550e5ca73cf90fc84e876f4795073fbb
        %19:4 = scf.for %14 = %c0 to %c1 step %c6 iter_args(%15 = %c5, %16 = %c5, %17 = %c5, %18 = %c5) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
          %20 = arith.addi %14, %c7 : index
          %21 = arith.divui %20, %c1 : index
          %22 = arith.remui %20, %c1 : index
          %23 = arith.addi %11, %21 : index
          %24 = arith.addi %11, %21 : index
          %25 = arith.addi %11, %21 : index
          %26 = arith.addi %11, %21 : index
          %27 = arith.addi %23, %4 : index
          memref.prefetch %m1[%27, %22, %c0], read, locality<3>, data : memref<2x32x64xi8>
          %28 = arith.addi %11, %4 : index
          %29 = vector.load %m1[%28, %14, %c0] : memref<2x32x64xi8>, vector<32xi8>
          %30 = vector.bitcast %29 : vector<32xi8> to vector<8xi32>
          %31 = arith.shli %30, %c8 : vector<8xi32>
          %32 = arith.andi %30, %c9 : vector<8xi32>
          %33 = vector.bitcast %31 : vector<8xi32> to vector<8xf32>
          %34 = vector.bitcast %32 : vector<8xi32> to vector<8xf32>
          %35 = arith.addi %11, %4 : index
          %36 = vector.load %m1[%35, %14, %c1] : memref<2x32x64xi8>, vector<32xi8>
          %37 = vector.bitcast %36 : vector<32xi8> to vector<8xi32>
          %38 = arith.shli %37, %c8 : vector<8xi32>
          %39 = arith.andi %37, %c9 : vector<8xi32>
          %40 = vector.bitcast %38 : vector<8xi32> to vector<8xf32>
          %41 = vector.bitcast %39 : vector<8xi32> to vector<8xf32>
          %42 = arith.subi %14, %c0 : index
          %43 = arith.muli %42, %c10 : index
          %44 = memref.load %7[%43] : memref<64xf32>
          %45 = vector.broadcast %44 : f32 to vector<8xf32>
          %46 = math.fma %33, %45, %15 : vector<8xf32>
          %47 = math.fma %40, %45, %16 : vector<8xf32>
          %48 = arith.subi %14, %c0 : index
          %49 = arith.muli %48, %c10 : index
          %50 = arith.addi %49, %c2 : index
          %51 = memref.load %7[%50] : memref<64xf32>
          %52 = vector.broadcast %51 : f32 to vector<8xf32>
          %53 = math.fma %34, %52, %17 : vector<8xf32>
          %54 = math.fma %41, %52, %18 : vector<8xf32>
          %55 = arith.addi %24, %4 : index
          memref.prefetch %m1[%55, %22, %c3], read, locality<3>, data : memref<2x32x64xi8>
          %56 = arith.addi %14, %c2 : index
// 74 lines more
          %129 = arith.subi %114, %c0 : index
          %130 = arith.muli %129, %c10 : index
          %131 = memref.load %7[%130] : memref<64xf32>
          %132 = vector.broadcast %131 : f32 to vector<8xf32>
          %133 = math.fma %120, %132, %104 : vector<8xf32>
          %134 = math.fma %127, %132, %105 : vector<8xf32>
          %135 = arith.subi %114, %c0 : index
          %136 = arith.muli %135, %c10 : index
          %137 = arith.addi %136, %c2 : index
          %138 = memref.load %7[%137] : memref<64xf32>
          %139 = vector.broadcast %138 : f32 to vector<8xf32>
          %140 = math.fma %121, %139, %111 : vector<8xf32>
          %141 = math.fma %128, %139, %112 : vector<8xf32>
          scf.yield %133, %134, %140, %141 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
        }
